"""Documents as text and pages for people, made from a document alone."""
