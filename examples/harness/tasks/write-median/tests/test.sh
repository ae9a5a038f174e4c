#!/bin/bash
# The tested program runs in a process of its own, and what it prints decides.
cd /app
printed=$(timeout 10 python3 -c 'import stats; v = [5, 1, 4]; print(stats.median(v), stats.median([1, 2, 3, 10]), v)' | tail -1)
if [ "$printed" = '4 2.5 [5, 1, 4]' ]; then echo 1; else echo 0; fi > /logs/verifier/reward.txt
