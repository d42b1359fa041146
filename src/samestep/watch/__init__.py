"""The page, report and plot of runs. Reads their records only, and does not need torch."""
