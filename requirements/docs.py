"""Make .cache/docs from the lock requirements/docs.txt: MkDocs, for the site of the pages (`make docs`)."""

import sys

import environment
import install

HOME = install.ROOT / ".cache" / "docs"

if __name__ == "__main__":
    sys.exit(environment.make_all("setup-docs", HOME, {install.ROOT / "requirements" / "docs.txt": HOME}))
