# The events that pretrained:full-hllhc, pixel-hllhc and quickstart-hllhc were trained on: 195 simulated ones, as files and
# as stores. On any number of ranks they are the same. 10 to 25 minutes and 8 GB with one process; the recipes of these
# networks go on from here. Needs the extra [acts].
#
#   sh recipes/events.sh
set -e
prepare="python -m domainpar.prepare --val-split .12 --test-split 0"

python recipes/solenoid.py solenoid.txt
# 45 events: mean pile-up from 60 to 200, beam spot 5 to 60 mm wide, both drawn for each event; 2 % of the hits are lost.
$prepare --source acts --simulate 45 --seed 1000 --input acts/mix-a --pile-up '60, 200' --beam-spot '0, 5, 60' \
  --hit-inefficiency 0.02 --store stores/mix-a
# 30 events in the field of a coil: 2 % of the modules are dead, and there is a hit of noise for ten others.
$prepare --source acts --simulate 30 --seed 2000 --input acts/mix-b --pile-up '60, 200' --beam-spot '0, 5, 60' \
  --field solenoid.txt --dead-modules 0.02 --noise 0.1 --store stores/mix-b
# 40 events with pile-up 200.
$prepare --source acts --simulate 40 --seed 3000 --input acts/mix-c --pile-up 200 --beam-spot '0, 5, 60' \
  --store stores/mix-c
# 40 events with pile-up 200 and wider beam spots, 60 to 90 mm. Only pixel-hllhc was trained on these, too.
$prepare --source acts --simulate 40 --seed 4000 --input acts/mix-d --pile-up 200 --beam-spot '0, 60, 90' \
  --store stores/mix-d
# 40 events of the built-in simulation, which has TrackML's field, beam spot and noise.
$prepare --events 40 --hits 100000 --store stores/toy
