"""What a cache holds: its layers and what attends over them, copies of a moment, conversion and reports."""
