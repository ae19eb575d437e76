"""Control logic: what runs next and where its blocks are. Imports no torch."""
