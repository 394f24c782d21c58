#!/usr/bin/env bash
# Does the decay help a small SiT with long skips on CIFAR-10, and which part of it: the learning rate, the gains of the
# branches, or the scale of the skips? Each arm is trained to STEPS steps (default 2000) with each of SEEDS (default
# "0") and probed at all blocks; docs/results.md has the results.
#
#     nice -n 19 benchmarks/studies/small_sit.sh TRAIN TEST 1.0=1e-3 0.8=1e-3 1.0=2e-3 0.8=2e-3 ...   # the map
#     SEEDS="1 2" nice -n 19 benchmarks/studies/small_sit.sh TRAIN TEST 1.0=1e-3 0.8=1e-3             # the best again
#     nice -n 19 benchmarks/studies/small_sit.sh TRAIN TEST 0.8=1e-3=gain 0.8=1e-3=over_gain          # the controls
#     nice -n 19 benchmarks/studies/small_sit.sh TRAIN TEST 1.0=1e-3=stream 0.8=1e-3=gain_stream      # the skips' scale
#     nice -n 19 benchmarks/studies/small_sit.sh TRAIN TEST 1.0=1e-3=layersync 1.0=1e-3=dispersive    # other losses
#
# `stream` scales the skips of a plain network as the decay 0.8 does; `gain_stream` is the decay, as gains of branches and
# scales of skips; `repa` takes TEACHER, a checkpoint of an encoder.
# TRAIN and TEST are class folders or zips of class folders. An arm is ALPHA_MIN=RATE[=CONTROL]. Run again to continue
# after an interruption.
set -euo pipefail
cd "$(dirname "$0")/../.."
train=$1 test=$2 steps=${STEPS:-2000}
shift 2
export OMP_NUM_THREADS=1

for arm in "$@"; do
    IFS='=' read -r alpha_min rate control <<<"$arm"
    case "$control" in
        "") flags=() ;;
        gain) flags=(--model.net.schedule gain) ;;
        over_gain) flags=(--model.optim.rate_over_gain true) ;;
        no_skips) flags=(--model.net.wiring official) ;;
        stream) flags=(--model.net.skip_scale stream:0.8) ;;
        gain_stream) flags=(--model.net.schedule gain --model.net.skip_scale stream) ;;
        layersync) flags=(--model.auxiliary+=LayerSync) ;;
        layersync_no_skips) flags=(--model.net.wiring official --model.auxiliary+=LayerSync) ;;
        dispersive) flags=(--model.auxiliary+=DispersiveLoss) ;;
        dispersive_free) flags=(--model.auxiliary+=DispersiveLoss --model.auxiliary.length free) ;;
        repa) flags=(--model.auxiliary+=REPA "--model.auxiliary.teacher=$TEACHER") ;;
        *) echo "$control is not a control of this study" >&2 && exit 2 ;;
    esac
    for seed in ${SEEDS:-0}; do
        name="small_sit_${alpha_min}_${rate}_s$seed${control:+_$control}"
        last=$(ls -d "runs/$name"/version_* 2>/dev/null | tail -1 || true)
        [ -n "$last" ] && [ -e "$last/probes_$steps/probes.csv" ] && continue
        python train.py fit --config benchmarks/studies/small_sit.yaml --data.path "$train" --trainer.max_steps "$steps" \
            --model.net.alpha_min "$alpha_min" --model.optim.lr "$rate" --seed_everything "$seed" ${flags+"${flags[@]}"} \
            --trainer.logger.experiment "$name" --ckpt_path auto
        folder=$(ls -d "runs/$name"/version_* | tail -1)
        python evaluate.py probe --data "$train" --test "$test" --max-train 8000 --max-test 5000 --times 0.1,0.3 \
            --ckpt "$folder/checkpoints/last.ckpt" --out "$folder/probes_$steps"
    done
done
python -m benchmarks.studies.small_sit "$steps"
