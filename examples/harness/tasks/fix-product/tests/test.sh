#!/bin/bash
# The tested program runs in a process of its own, and what it prints decides.
cd /app
printed=$(timeout 10 python3 -c 'import calc; print(calc.mul(6, 7), calc.mul(-3, 4), calc.mul(0, 9))' | tail -1)
if [ "$printed" = '42 -12 0' ]; then echo 1; else echo 0; fi > /logs/verifier/reward.txt
