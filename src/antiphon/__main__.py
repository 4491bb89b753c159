"""``python -m antiphon``: the same as the ``antiphon`` command."""

from __future__ import annotations

from antiphon.cli.main import main

if __name__ == "__main__":
    main(prog_name="antiphon")
