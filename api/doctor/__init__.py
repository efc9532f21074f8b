"""`reelgate doctor`: what a deployment needs, looked at one by one, each with what to do when it is wrong."""
