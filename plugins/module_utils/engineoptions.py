# SPDX-License-Identifier: Apache-2.0
"""The options of SGLang's launcher by release, as its own parser of each release lists them (data only).

Read from the parsers of every minor release from FIRST to LAST; the contract tests hold this table to the real parsers
of pinned releases. A post-release (0.5.12.post1) has the options of its release.
"""

from __future__ import annotations

FIRST = "0.5.9"
LAST = "0.5.23"

# (first release that has it, last one or None) -> names without their dashes
SPANS = {
    ("0.5.9", "0.5.9"): (
        "disable-hicache-numa-detect disaggregation-decode-dp disaggregation-decode-tp disaggregation-prefill-pp "
        "hierarchical-sparse-attention-extra-config mm-max-concurrent-calls mm-per-request-timeout "
        "speculative-ngram-branch-length speculative-ngram-max-match-window-size "
        "speculative-ngram-min-match-window-size"
    ),
    ("0.5.9", "0.5.10"): (
        "ds-channel-config-path ds-heavy-channel-num ds-heavy-channel-type ds-heavy-token-num "
        "ds-sparse-decode-threshold enable-double-sparsity multi-item-scoring-delimiter"
    ),
    ("0.5.9", "0.5.12"): "enable-nan-detection",
    ("0.5.9", "0.5.13"): (
        "custom-sigquit-handler debug-tensor-dump-inject enable-piecewise-cuda-graph hybrid-kvcache-ratio"
    ),
    ("0.5.9", "0.5.17"): "torchao-config",
    ("0.5.9", "0.5.19"): (
        "collect-tokens-histogram cuda-graph-bs cuda-graph-max-bs enable-expert-distribution-metrics "
        "enable-nsa-prefill-context-parallel mamba-scheduler-strategy nsa-decode-backend nsa-prefill-backend "
        "nsa-prefill-cp-mode piecewise-cuda-graph-compiler piecewise-cuda-graph-max-tokens "
        "piecewise-cuda-graph-tokens prefill-round-robin-balance stream-output"
    ),
    ("0.5.9", "0.5.20"): "keep-mm-feature-on-device",
    ("0.5.9", None): (
        "abort-on-priority-when-disabled admin-api-key allow-auto-truncate api-key attention-backend "
        "attention-context-parallel-size attn-cp-size base-gpu-id bucket-e2e-request-latency "
        "bucket-inter-token-latency bucket-time-to-first-token chat-template "
        "checkpoint-engine-wait-weights-before-ready chunked-prefill-size completion-template config "
        "constrained-json-disable-any-whitespace constrained-json-whitespace-pattern context-length cpu-offload-gb "
        "crash-dump-folder custom-weight-loader data-parallel-size debug-tensor-dump-input-file "
        "debug-tensor-dump-layers debug-tensor-dump-output-folder decode-attention-backend decode-log-interval "
        "decrypted-config-file decrypted-draft-config-file deepep-config deepep-mode delete-ckpt-after-loading device "
        "disable-chunked-prefix-cache disable-cuda-graph disable-cuda-graph-padding disable-custom-all-reduce "
        "disable-fast-image-processor disable-flashinfer-autotune disable-flashinfer-cutlass-moe-fp4-allgather "
        "disable-hybrid-swa-memory disable-outlines-disk-cache disable-overlap-schedule disable-radix-cache "
        "disable-shared-experts-fusion disable-tokenizer-batch-decode disaggregation-bootstrap-port "
        "disaggregation-decode-enable-offload-kvcache disaggregation-decode-polling-interval disaggregation-ib-device "
        "disaggregation-mode disaggregation-transfer-backend dist-init-addr dist-timeout dllm-algorithm "
        "dllm-algorithm-config download-dir dp-size dtype dynamic-batch-tokenizer-batch-size "
        "dynamic-batch-tokenizer-batch-timeout elastic-ep-backend enable-attn-tp-input-scattered "
        "enable-broadcast-mm-inputs-process enable-cache-report enable-cudagraph-gc enable-custom-logit-processor "
        "enable-deterministic-inference enable-dp-attention enable-dp-lm-head enable-draft-weights-cpu-backup "
        "enable-dynamic-batch-tokenizer enable-dynamic-chunking enable-eplb enable-flashinfer-allreduce-fusion "
        "enable-fp32-lm-head enable-fused-qk-norm-rope enable-hierarchical-cache enable-layerwise-nvtx-marker "
        "enable-lmcache enable-lora enable-lora-overlap-loading enable-memory-saver enable-metrics "
        "enable-metrics-for-all-schedulers enable-mixed-chunk enable-mscclpp enable-multi-layer-eagle "
        "enable-multimodal enable-nccl-nvls enable-p2p-check enable-pdmux enable-precise-embedding-interpolation "
        "enable-prefill-delayer enable-prefix-mm-cache enable-priority-scheduling enable-profile-cuda-graph "
        "enable-request-time-stats-logging enable-return-hidden-states enable-return-routed-experts "
        "enable-single-batch-overlap enable-symm-mem enable-tokenizer-batch-encode enable-torch-compile "
        "enable-torch-compile-debug-mode enable-torch-symm-mem enable-trace enable-two-batch-overlap "
        "enable-weights-cpu-backup encoder-only encoder-transfer-backend encoder-urls ep ep-dispatch-algorithm "
        "ep-num-redundant-experts ep-size eplb-algorithm eplb-min-rebalancing-utilization-threshold "
        "eplb-rebalance-layers-per-chunk eplb-rebalance-num-iterations expert-distribution-recorder-buffer-size "
        "expert-distribution-recorder-mode expert-parallel-size export-metrics-to-file export-metrics-to-file-dir "
        "extra-metric-labels fastapi-root-path file-storage-path flashinfer-mla-disable-ragged "
        "flashinfer-mxfp4-moe-precision forward-hooks fp4-gemm-backend fp8-gemm-backend gc-warning-threshold-secs "
        "generation-tokens-buckets gpu-id-step grammar-backend grpc-mode help hf-chat-template-name "
        "hicache-io-backend hicache-mem-layout hicache-ratio hicache-size hicache-storage-backend "
        "hicache-storage-backend-extra-config hicache-storage-prefetch-policy hicache-write-policy host "
        "init-expert-location is-embedding json-model-override-args kt-cpuinfer kt-max-deferred-experts-per-token "
        "kt-method kt-num-gpu-experts kt-threadpool-count kt-weight-path kv-cache-dtype kv-events-config "
        "language-only limit-mm-data-per-request load-balance-method load-format log-level log-level-http "
        "log-requests log-requests-format log-requests-level log-requests-target lora-backend lora-eviction-policy "
        "lora-paths lora-target-modules mamba-backend mamba-full-memory-ratio mamba-ssm-dtype mamba-track-interval "
        "max-loaded-loras max-lora-chunk-size max-lora-rank max-loras-per-batch max-mamba-cache-size "
        "max-prefill-tokens max-queued-requests max-running-requests max-total-tokens mem-fraction-static "
        "mm-attention-backend mm-enable-dp-encoder mm-process-config model model-checksum model-impl "
        "model-loader-extra-config model-path modelopt-checkpoint-restore-path modelopt-checkpoint-save-path "
        "modelopt-export-path modelopt-quant moe-a2a-backend moe-data-parallel-size moe-dense-tp-size moe-dp-size "
        "moe-runner-backend mooncake-ib-device nccl-init-addr nccl-port nnodes node-rank num-continuous-decode-steps "
        "num-reserved-decode-tokens numa-node offload-group-size offload-mode offload-num-in-group "
        "offload-prefetch-step otlp-traces-endpoint page-size pdmux-config-path pipeline-parallel-size port "
        "pp-async-batch-depth pp-max-micro-batch-size pp-size preferred-sampling-params prefill-attention-backend "
        "prefill-delayer-forward-passes-buckets prefill-delayer-max-delay-passes "
        "prefill-delayer-token-usage-low-watermark prefill-delayer-wait-seconds-buckets prefill-max-requests "
        "priority-scheduling-preemption-threshold prompt-tokens-buckets quantization quantization-param-path "
        "quantize-and-serve radix-eviction-policy random-seed reasoning-parser remote-instance-weight-loader-backend "
        "remote-instance-weight-loader-seed-instance-ip remote-instance-weight-loader-seed-instance-service-port "
        "remote-instance-weight-loader-send-weights-group-ports "
        "remote-instance-weight-loader-start-seed-via-transfer-engine revision rl-on-policy-target rl-quant-profile "
        "sampling-backend sampling-defaults schedule-conservativeness schedule-low-priority-values-first "
        "schedule-policy scheduler-recv-interval served-model-name show-time-cost skip-server-warmup "
        "skip-tokenizer-init sleep-on-idle sm-group-num soft-watchdog-timeout speculative-accept-threshold-acc "
        "speculative-accept-threshold-single speculative-algorithm speculative-attention-mode "
        "speculative-draft-attention-backend speculative-draft-load-format speculative-draft-model "
        "speculative-draft-model-path speculative-draft-model-quantization speculative-draft-model-revision "
        "speculative-eagle-topk speculative-moe-a2a-backend speculative-moe-runner-backend speculative-ngram-capacity "
        "speculative-ngram-match-type speculative-ngram-max-bfs-breadth speculative-ngram-min-bfs-breadth "
        "speculative-num-draft-tokens speculative-num-steps speculative-token-map stream-interval "
        "swa-full-tokens-ratio tbo-token-distribution-threshold tensor-parallel-size "
        "tokenizer-metrics-allowed-custom-labels tokenizer-metrics-custom-labels-header tokenizer-mode tokenizer-path "
        "tokenizer-worker-num tool-call-parser tool-server torch-compile-max-bs tp-size "
        "triton-attention-num-kv-splits triton-attention-reduce-in-fp32 triton-attention-split-tile-size "
        "trust-remote-code uvicorn-access-log-exclude-prefixes warmups watchdog-timeout weight-loader-disable-mmap "
        "weight-version"
    ),
    ("0.5.10", "0.5.19"): (
        "disable-piecewise-cuda-graph enable-prefill-context-parallel enforce-piecewise-cuda-graph prefill-cp-mode"
    ),
    ("0.5.10", None): (
        "default-priority-value disable-priority-preemption enable-adaptive-dispatch-to-encoder "
        "enable-aiter-allreduce-fusion enable-elastic-expert-backup enable-fused-moe-sum-all-reduce enable-hisparse "
        "enable-mfu-metrics enable-mm-global-cache enable-ssl-refresh enable-streaming-session "
        "enforce-disable-flashinfer-allreduce-fusion engine-info-bootstrap-port experts-shared-outer-loras "
        "gc-threshold hisparse-config incremental-streaming-output linear-attn-backend linear-attn-decode-backend "
        "linear-attn-prefill-backend modelexpress-config no-experts-shared-outer-loras pre-warm-nccl "
        "speculative-ngram-max-trie-depth ssl-ca-certs ssl-certfile ssl-keyfile ssl-keyfile-password "
        "stream-response-default-include-usage use-ray"
    ),
    ("0.5.11", "0.5.12"): "no-record-nolora-graph record-nolora-graph",
    ("0.5.11", "0.5.19"): "enable-breakable-cuda-graph speculative-dflash-draft-window-size",
    ("0.5.11", "0.5.20"): "elastic-ep-rejoin",
    ("0.5.11", "0.5.22"): "speculative-skip-dp-mlp-sync",
    ("0.5.11", None): (
        "batch-notify-size debug-cuda-graph disaggregation-decode-enable-radix-cache "
        "enable-dp-attention-local-control-broadcast enable-http2 enable-mis enable-quant-communications "
        "enforce-shared-experts-fusion grpc-http-sidecar-port lora-strict-loading lora-use-virtual-experts "
        "msprobe-dump-config no-lora-strict-loading speculative-adaptive speculative-adaptive-config "
        "speculative-dflash-block-size speculative-ngram-external-corpus-max-tokens "
        "speculative-ngram-external-corpus-path speculative-ngram-external-sam-budget strip-thinking-cache "
        "tokenizer-backend weight-loader-prefetch-checkpoints weight-loader-prefetch-num-threads"
    ),
    ("0.5.12", "0.5.15"): "enable-deepep-waterfill",
    ("0.5.12", None): (
        "detokenizer-worker-num enable-forward-pass-metrics enable-return-indexer-topk enable-strict-thinking "
        "forward-pass-metrics-ipc-name forward-pass-metrics-worker-id hierarchical-sparse-attention-extra-config "
        "lora-drain-wait-threshold model-config-parser prefill-delayer-max-delay-ms prefill-delayer-queue-min-ratio "
        "prefill-only-disable-kv-cache speculative-draft-window-size weight-loader-drop-cache-after-load"
    ),
    ("0.5.13", "0.5.15"): "optimistic-prefill-retries",
    ("0.5.13", "0.5.19"): "dsa-prefill-cp-mode enable-dsa-prefill-context-parallel",
    ("0.5.13", None): (
        "asr-max-buffer-seconds asr-max-concurrent-sessions deepep-dispatcher-output-dtype disable-attn-tp-gather "
        "dsa-decode-backend dsa-prefill-backend dsa-topk-backend enable-deepseek-v4-fp4-indexer "
        "encoder-bootstrap-port encoder-register-urls kv-canary kv-canary-real-data kv-canary-sweep-interval "
        "lmcache-config-file load-snapshot-publish-interval radix-cache-backend trace-modules"
    ),
    ("0.5.14", "0.5.21"): "cuda-graph-tc-compiler",
    ("0.5.14", None): (
        "cp-strategy cuda-graph-backend-decode cuda-graph-backend-prefill cuda-graph-bs-decode cuda-graph-bs-prefill "
        "cuda-graph-config cuda-graph-max-bs-decode cuda-graph-max-bs-prefill disable-decode-cuda-graph "
        "disable-prefill-cuda-graph disaggregation-decode-extra-slots enable-int8-mamba-checkpoint enable-prefill-cp "
        "flashinfer-allreduce-fusion-backend int8-mamba-ckpt-size mamba-radix-cache-strategy "
        "speculative-use-rejection-sampling"
    ),
    ("0.5.15", None): (
        "bf16-gemm-backend dcp-size decode-context-parallel-size decoupled-spec-bind-endpoint "
        "decoupled-spec-connect-endpoints decoupled-spec-rank decoupled-spec-role dsa-paged-mqa-logits-backend "
        "enable-linear-replayssm enable-mamba-cache-stochastic-rounding enable-page-major-kv-layout "
        "enable-session-radix-cache enable-tf32-matmul enable-unified-memory linear-replayssm-cache-len "
        "mamba-cache-philox-rounds min-free-slots-delay spec-trace-dir"
    ),
    ("0.5.16", "0.5.19"): "enable-gdn-replayssm-spec",
    ("0.5.16", None): (
        "default-chat-template-kwargs dllm-fdfo elastic-ep-initial-size elastic-ep-join-mode "
        "elastic-ep-join-rank-offset elastic-ep-scale-timeout enable-dsa-cache-layer-split enable-flexkv "
        "enable-scattered-sconv enable-waterfill flexkv-config-file fuseep-mode grpc-port max-ep-size "
        "mm-feature-transport no-dllm-fdfo optimistic-prefill-attempts retraction-policy sidecar sidecar-args "
        "smg-grpc-mode smg-http-sidecar-port speculative-dspark-align-verify-tokens-to-graph-tier "
        "speculative-dspark-block-size speculative-dspark-confidence-sts-path speculative-dspark-sps-table-path"
    ),
    ("0.5.17", None): (
        "dcp-comm-backend dcp-replicate-q-proj dwdp-size enable-cp-decode-attn-tp enable-linear-replayssm-spec "
        "flashinfer-autotune-skip-ops linear-attn-verify-backend mamba-max-states-per-path mm-io-worker-num "
        "mm-processor-worker-num no-dcp-replicate-q-proj return-hidden-states-mode weight-cache-mode "
        "weight-cache-socket weight-cache-timeout"
    ),
    ("0.5.18", None): (
        "allowed-media-domains c128-page-size disaggregation-decode-retraction-backup enable-tp-lm-head-all-to-all "
        "expert-balancedness-report-mode http2-max-concurrent-streams image-processor-backend language-model-only "
        "media-url-max-file-size-mb mlx-enable-sampling mm-global-cache-backend mm-preprocess-cache-size-mb "
        "no-enable-tp-lm-head-all-to-all speculative-draft-kv-cache-dtype startup-weight-load-mode "
        "trust-mm-content-hashes"
    ),
    ("0.5.19", None): (
        "deepep-v2-mode dsv4-prefill-backend enable-dense-mlp-attn-tp enable-layernorm-sp enable-lean-attention "
        "enable-shared-experts-attn-tp enable-w4a4-mxfp4-megamoe gated-launch-port hicache-host-memory-mode "
        "hicache-storage-prefetch-retry-max-attempts hicache-storage-prefetch-retry-poll-interval "
        "http2-initial-connection-window-size load-publish-endpoint prefill-decode-interval "
        "speculative-dsa-topk-backend"
    ),
    ("0.5.20", None): (
        "dsv4-attn-backend enable-response-store enable-unified-cache-external-linker flashinfer-a2a-dispatch-type "
        "no-ple-offload-embedding ple-offload-backend ple-offload-dir ple-offload-embedding "
        "radix-eviction-policy-config return-input-ids return-output-ids sampling-mask-max-tokens "
        "speculative-domino-candidate-pool-size unified-cache-external-linker-backend uno-lora-path"
    ),
    ("0.5.21", None): (
        "boundary-reduction constrained-json-max-whitespace-cnt context-bucket cuda-graph-max-seq-len-prefill "
        "cuda-graph-prefill-max-context disable-aiter-allreduce-fusion-in-decode "
        "disable-aiter-allreduce-fusion-in-prefill disaggregation-decode-host-receive-threshold "
        "disaggregation-enable-kv-checksum enable-decoder-swa-bounded-replay enable-encoder-swa-bounded-replay "
        "enable-linker-mla-dedup enable-pd-role-switch grpc-response-timeout-secs hicache-host-memory-fraction "
        "otlp-service-name prefill-kv-cache-dequant-dtype shared-experts-tp-size speculative-draft-sink-size "
        "swa-prefix-tails trust-request-chat-template"
    ),
    ("0.5.22", None): (
        "attention-data-parallel-size attn-dp-size disaggregation-decode-allocation-policy dsa-triton-union "
        "enable-dsa-fused-indexer enable-kv-cache-sharding enable-watermark no-enable-dsa-fused-indexer "
        "no-speculative-enable-w4a4-mxfp4-megamoe qsa-indexer-dtype speculative-enable-w4a4-mxfp4-megamoe "
        "speculative-use-block-verification watermark-config"
    ),
    ("0.5.23", None): (
        "enable-amd-monokernel enable-hicache enable-http-worker-reuseport enable-megamoe-for-layernorm-sp "
        "enable-nvidia-megakernel enable-paged-experts enable-return-aux-hidden-states monokernel-backend "
        "no-enable-decoder-swa-bounded-replay no-enable-fused-qk-norm-rope no-enable-tf32-matmul "
        "no-mm-enable-dp-encoder paged-experts-num-resident prefill-decode-interval-min-bs "
        "return-aux-hidden-state-layer-ids unified-cache-external-linker-config"
    ),
}
