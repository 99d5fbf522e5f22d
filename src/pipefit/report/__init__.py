"""Documents as text for people. A report is made from a document, without a run or a terminal, and is tested so."""
