"""The demo: a year of flights through the whole runtime. `make demo` runs it."""
