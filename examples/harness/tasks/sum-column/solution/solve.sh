#!/bin/bash
awk -F, '$1 == "Oslo" { sum += $2 } END { print sum }' /app/sales.csv > /app/sum.txt
