// Two gradients of some nets, in rows of `size` numbers: their inner products, and one moved along the other.
// Grid (blocks, nets).

#define KERNEL extern "C" __global__ void

// Each block's share of <a, b>, <a, a> and <b, b>, for all warps of a block.
KERNEL products(const REAL* a, const REAL* b, double* sums, long long size) {
    __shared__ double shares[3][32];
    double own[3] = {0, 0, 0};
    const long long row = blockIdx.y * size, stride = (long long)gridDim.x * blockDim.x;
    for (long long at = (long long)blockIdx.x * blockDim.x + threadIdx.x; at < size; at += stride) {
        const double x = a[row + at], y = b[row + at];
        own[0] += x * y;
        own[1] += x * x;
        own[2] += y * y;
    }
    for (int k = 0; k < 3; k++) {
        for (int step = 16; step > 0; step /= 2) own[k] += __shfl_down_sync(0xffffffff, own[k], step);
        if (threadIdx.x % 32 == 0) shares[k][threadIdx.x / 32] = own[k];
    }
    __syncthreads();
    if (threadIdx.x >= 3) return;
    double total = 0;
    for (int warp = 0; warp < blockDim.x / 32; warp++) total += shares[threadIdx.x][warp];
    sums[((long long)blockIdx.y * gridDim.x + blockIdx.x) * 3 + threadIdx.x] = total;
}

// result = a + v b, with a v for each net.
KERNEL moved(const REAL* a, const REAL* b, const double* v, REAL* result, long long size) {
    const double factor = v[blockIdx.y];
    const long long row = blockIdx.y * size, stride = (long long)gridDim.x * blockDim.x;
    for (long long at = (long long)blockIdx.x * blockDim.x + threadIdx.x; at < size; at += stride) {
        result[row + at] = a[row + at] + REAL(factor * b[row + at]);
    }
}
