COLUMN_BLOCK = 16
"""Numbers of a row that kernels take at once: widths of tables are multiples of it."""
