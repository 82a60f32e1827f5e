"""`python -m gasloc_p2p` is the `gasloc` command."""

from gasloc_p2p.cli import main

if __name__ == "__main__":
    main()
