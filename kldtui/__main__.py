"""`python -m kldtui` is the `kldtui` command."""

from kldtui.cli import main

if __name__ == "__main__":
    main()
