"""`python -m tidewal` is the command `tidewal`."""

from tidewal.cli.main import main

main()
