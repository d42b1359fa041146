"""Every call that writes fails, and the power is lost at every sync."""
