"""Pure decisions: who owns which block, what runs now, which workers serve a request. No clock of its own."""
