"""What processes of vLLM are told before they import it, on the CPU and on a GPU."""

SETTINGS = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "OMP_NUM_THREADS": "1",
    "NUMBA_NUM_THREADS": "1",  # drafts of n-grams: threads that wait for each other take twice the time beside another process
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "KVQ_VLLM_CPU": "1",
    # On a GPU: products of float32 are float32's, and nothing is asked for that must be built first.
    "TRITON_F32_DEFAULT": "ieee",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
}
