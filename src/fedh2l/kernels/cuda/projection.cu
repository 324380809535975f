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

__device__ double at_least(double value, double least) {
    return value < least ? least : value;  // what is not a number stays so
}

// What the shares of all blocks come to, one warp a net: results has a row each for <a, b>, <a, a>, <b, b>, whether the
// first is negative, and the angle between the two in degrees.
KERNEL related(const double* sums, double* results, long long blocks, long long nets, double tiny) {
    const long long net = blockIdx.x;
    double own[3] = {0, 0, 0};
    for (long long block = threadIdx.x; block < blocks; block += 32)
        for (int k = 0; k < 3; k++) own[k] += sums[(net * blocks + block) * 3 + k];
    for (int k = 0; k < 3; k++)
        for (int step = 16; step > 0; step /= 2) own[k] += __shfl_down_sync(0xffffffff, own[k], step);
    if (threadIdx.x > 0) return;
    for (int k = 0; k < 3; k++) results[k * nets + net] = own[k];
    results[3 * nets + net] = own[0] < 0;
    const double cosine = own[0] / (sqrt(at_least(own[1], tiny)) * sqrt(at_least(own[2], tiny)));
    results[4 * nets + net] = acos(cosine > 1 ? 1 : at_least(cosine, -1)) * 57.29577951308232;
}

// result = a + v b, with v = max(0, -<a, b> / <b, b>) for each net.
KERNEL moved(const REAL* a, const REAL* b, const double* inner, const double* square, REAL* result, long long size,
             double tiny) {
    const double factor = at_least(-inner[blockIdx.y], 0) / at_least(square[blockIdx.y], tiny);
    const long long row = blockIdx.y * size, stride = (long long)gridDim.x * blockDim.x;
    for (long long at = (long long)blockIdx.x * blockDim.x + threadIdx.x; at < size; at += stride) {
        result[row + at] = a[row + at] + REAL(factor * b[row + at]);
    }
}
