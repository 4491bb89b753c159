"""What can be seen: metric names, the receipt of a request, exporters."""
