#!/bin/bash
if [ "$(tr -d '[:space:]' < /app/sum.txt)" = 40 ]; then echo 1; else echo 0; fi > /logs/verifier/reward.txt
