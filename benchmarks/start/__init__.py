"""Time from the command to the end of the first step, for each launcher as documented."""
