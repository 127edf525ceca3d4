"""Does a public network train in three stages with the bits of the plain loop? One row for each."""
