"""DoGE's machinery: a proxy whose gradient is watched domain by domain, and its mixture."""
