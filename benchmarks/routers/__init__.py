"""One router process under load, its workers answering at once."""
