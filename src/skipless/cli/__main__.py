"""`python -m skipless.cli`: the command line without its script, as torchrun wants it."""

from skipless.cli.app import main

main()
