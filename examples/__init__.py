"""Complete small runs on one machine; README.md in this folder lists them."""
