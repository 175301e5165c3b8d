"""A web server with a page and an API for translation."""
