"""Command line of mtjax: python launch.py [command] --config RECIPE [overrides]."""

from mtjax.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
