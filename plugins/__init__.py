"""Optional parts of turnlog: dashboard, Faust views, exporters, sandbox backends, Ray, offline training, ready recipes.

No other package imports these modules: entry points and command-line verbs name them, so that each of them can be
removed, or copied as the beginning of a package of one's own.
"""

if __name__ == "plugins":
    raise ImportError("import turnlog.plugins, not plugins: a twin import copies every class")
