"""`python -m domainpar.infer`."""

import sys

from domainpar.infer import main

if __name__ == "__main__":
    sys.exit(main())
