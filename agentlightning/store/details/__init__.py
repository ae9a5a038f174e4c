"""Single things in the form that a page wants: outlines of spans, versions of resources, tokens as texts."""
