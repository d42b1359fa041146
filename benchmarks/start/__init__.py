"""From the command to the end of the first step, written for each launcher as its documentation teaches."""
