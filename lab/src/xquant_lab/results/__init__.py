"""What is made of results: files of rows, comparisons, pictures and the page."""
