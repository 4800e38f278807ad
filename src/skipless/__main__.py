"""`python -m skipless`: the command line without its script, as torchrun wants it."""

from skipless.cli import main

if __name__ == "__main__":  # worker processes import this module too
    main()
