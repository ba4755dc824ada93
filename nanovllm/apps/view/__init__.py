"""The window: what a run writes down, the page that a browser opens, and arrays for a script that draws."""
