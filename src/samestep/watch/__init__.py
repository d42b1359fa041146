"""The live page: what a record tells of its run, over HTTP; reads records only, and needs no torch."""
