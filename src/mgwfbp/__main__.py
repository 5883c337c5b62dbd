"""``python -m mgwfbp`` is ``mgwfbp``."""

from mgwfbp.cli import main

if __name__ == "__main__":
    main()
