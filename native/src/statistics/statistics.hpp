// Statistics, linear sketch and content hash of a run of elements, in one pass over its bytes. docs/sketches.md defines
// them.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "base/checksums/checksum.hpp"
#include "statistics/kernel.hpp"

namespace dsh {

struct Statistics {
    std::uint64_t count = 0;
    std::uint64_t nan = 0;
    std::uint64_t inf = 0;
    std::uint64_t zeros = 0;
    double min = 0; // of all elements but NaN; without any, min is +Inf and max -Inf
    double max = 0;
    double sum = 0; // this and all below: of the finite elements
    double sum_of_squares = 0;
    std::array<std::uint64_t, exponent_bins> exponents{}; // zeros left out
    std::vector<double> sketch;
    Digest checksum{};
};

struct Run {
    const void *data;
    std::size_t nbytes;
    std::string_view dtype;
    std::uint64_t start; // global index of the first element
};

// The kernels that this processor runs, fastest first; the last is "portable".
std::vector<std::string> statistics_kernels();

// `key` chooses the sketch's signs and positions, `buckets` its size (0: no sketch); `kernel` is one of
// statistics_kernels(), or empty for the first. Throws std::invalid_argument naming the argument that does not fit.
Statistics statistics(const Run &run, std::uint64_t key, std::uint64_t buckets, std::string_view kernel);

} // namespace dsh
