"""What each feature of the scheduling brings, before and after.

A row is one function `measure(quick) -> list[Row]` (see `row.py`), listed in `__main__.ROWS`.
"""
