"""The CPU adaptation of SGLang; `site/` stands first on the path of a server's processes."""
