"""x, packed codes, absmax → x · Wᵀ, without writing what is decoded, for up to 512 rows of x."""
