"""`python -m nf4conv`."""

from nf4conv.cli import main

if __name__ == "__main__":
    main()
