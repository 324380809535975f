// Adam, and AMSGrad where `largest` is kept, for nets in rows of `size` parameters. Grid (blocks, nets).

#define KERNEL extern "C" __global__ void

KERNEL adam(REAL* parameters, const REAL* gradients, REAL* means, REAL* squares, REAL* largest, const long long* steps,
            long long size, double rate, double decay, double beta1, double beta2, double epsilon) {
    __shared__ REAL step, correction;
    if (threadIdx.x == 0) {
        const double taken = steps[blockIdx.y];
        step = rate / (1 - pow(beta1, taken));
        correction = sqrt(1 - pow(beta2, taken));
    }
    __syncthreads();
    const long long stride = (long long)gridDim.x * blockDim.x;
    for (long long at = (long long)blockIdx.x * blockDim.x + threadIdx.x; at < size; at += stride) {
        const long long i = blockIdx.y * size + at;
        const REAL gradient = gradients[i] + REAL(decay) * parameters[i];
        const REAL mean = means[i] + REAL(1 - beta1) * (gradient - means[i]);
        REAL square = squares[i] * REAL(beta2) + REAL(1 - beta2) * gradient * gradient;
        means[i] = mean;
        squares[i] = square;
        if (largest) {
            if (largest[i] > square || largest[i] != largest[i]) square = largest[i];
            largest[i] = square;
        }
        parameters[i] -= mean / (sqrt(square) / correction + REAL(epsilon)) * step;
    }
}
