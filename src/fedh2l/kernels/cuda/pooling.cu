// The largest value of each window of K × K pixels; windows do not overlap. x (planes, H, W), y (planes, H / K, W / K).

#define KERNEL extern "C" __global__ void
constexpr int HO = H / K, WO = W / K;

KERNEL pool(const REAL* x, REAL* y, unsigned char* where, long long outputs) {
    const long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= outputs) return;
    const int p = i % (HO * WO);
    const REAL* window = x + (i / (HO * WO) * H + p / WO * K) * W + p % WO * K;
    REAL largest = window[0];
    int at = 0;
#pragma unroll
    for (int k = 1; k < K * K; k++) {
        const REAL value = window[k / K * W + k % K];
        if (value > largest || value != value) largest = value, at = k;  // what is not a number is passed on
    }
    y[i] = largest;
    where[i] = at;
}

KERNEL unpool(const REAL* g, const unsigned char* where, REAL* out, long long inputs) {
    const long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= inputs) return;
    const int p = i % (H * W), row = p / W, column = p % W;
    REAL value = 0;
    if (row < HO * K && column < WO * K) {  // what windows do not cover has no part in the output
        const long long window = i / (H * W) * HO * WO + row / K * WO + column / K;
        if (where[window] == row % K * K + column % K) value = g[window];
    }
    out[i] = value;
}
