"""The window: a trace as one page that a browser opens, and as arrays for a script that draws."""
