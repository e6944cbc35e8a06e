"""Weight → packed codes, absmax and the codes of absmax."""
