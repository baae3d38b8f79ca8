"""Measurements of a method: one task a file, results as JSON rows, pictures and pages made from them."""
