"""Writes docs/faults.md: `python -m domainpar.faults > docs/faults.md`."""

from domainpar.faults.page import page

if __name__ == "__main__":
    print(page(), end="")
