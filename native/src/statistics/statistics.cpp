#include "statistics/statistics.hpp"

#include <algorithm>
#include <bit>
#include <cfenv>
#include <cmath>
#include <cstdlib>
#include <limits>
#include <stdexcept>

#include "statistics/elements.hpp"

namespace dsh {
namespace {

constexpr std::uint64_t stretch_elements = most_blocks * block_elements;
constexpr std::size_t hashed_bytes = 64 << 10;       // hashed together, while they are still in the cache
constexpr std::uint64_t unpaired_elements = 1 << 24; // after which the pairs are emptied, long before they overflow
constexpr std::uint64_t most_buckets = 1 << 20;

constexpr std::array kernels = {
#ifdef __x86_64__
    &avx512_kernel,
    &avx2_kernel,
#endif
    &portable_kernel,
};

const Kernel &chosen_kernel(std::string_view name) {
    for (const Kernel *kernel : kernels) {
        if (kernel->works() && (name.empty() || name == kernel->name)) {
            return *kernel;
        }
    }
    std::string known;
    for (const std::string &one : statistics_kernels()) {
        known += (known.empty() ? "" : ", ") + one;
    }
    throw std::invalid_argument("kernel " + std::string(name) + " is not one of those that run here: " + known);
}

// The default floating-point environment, as long as this exists. A training may flush denormals to zero in its
// threads, but statistics count denormals.
class DefaultArithmetic {
  public:
    DefaultArithmetic() {
        std::fegetenv(&before_);
        std::fesetenv(FE_DFL_ENV);
    }
    ~DefaultArithmetic() { std::fesetenv(&before_); }
    DefaultArithmetic(const DefaultArithmetic &) = delete;
    DefaultArithmetic &operator=(const DefaultArithmetic &) = delete;

  private:
    std::fenv_t before_;
};

class Gathering {
  public:
    Gathering(const Kernel &kernel, const Elements &elements, Sketching sketching)
        : kernel_(kernel), elements_(elements), adding_(adding()), sketching_(sketching) {
        tally_.min = std::numeric_limits<double>::infinity();
        tally_.max = -tally_.min;
    }

    const Tally &tally() const { return tally_; }

    // Add at most stretch_elements. Blocks begin at global indices that are multiples of 16, so the elements before the
    // first such index and after the last one are added as parts of a block.
    void add(const std::byte *data, std::uint64_t start, std::size_t count) {
        const std::size_t first = std::min(count, static_cast<std::size_t>(-start % block_elements));
        const std::size_t whole = (count - first) / block_elements;
        const std::size_t last = first + whole * block_elements;
        add_some(data, start, first);
        if (whole != 0) {
            add_whole(data + first * elements_.nbytes, whole, (start + first) / block_elements);
        }
        add_some(data + last * elements_.nbytes, start + last, count - last);
    }

    // Move the counts of pairs to the bins of their elements.
    void unpair(std::array<std::uint64_t, exponent_bins> &bins) {
        for (auto &pairs : tally_.pairs) {
            for (std::size_t second = 0; second < exponent_bins; ++second) {
                std::uint32_t *row = pairs + second * exponent_bins;
                std::uint32_t seconds = 0;
                for (std::size_t first = 0; first < exponent_bins; ++first) {
                    bins[first] += row[first];
                    seconds += row[first];
                    row[first] = 0;
                }
                bins[second] += seconds;
            }
        }
    }

  private:
    const Kernel &kernel_;
    const Elements &elements_;
    AddBlocks adding_;
    Sketching sketching_;
    Tally tally_{};
    alignas(64) std::byte decoded_[stretch_elements * sizeof(double)];

    bool wide() const { return elements_.form == Form::f64; }
    std::size_t number_bytes() const { return wide() ? sizeof(double) : sizeof(float); }

    AddBlocks adding() const {
        switch (elements_.form) {
        case Form::f64:
            return kernel_.f64;
        case Form::f32:
            return kernel_.f32;
        case Form::bf16:
            return kernel_.bf16;
        case Form::f16:
            return kernel_.f16;
        }
        std::abort();
    }

    void add_whole(const std::byte *data, std::size_t blocks, std::uint64_t first_block) {
        const void *numbers = data;
        if (elements_.decoded) {
            elements_.decode(data, blocks * block_elements, decoded_);
            numbers = decoded_;
        }
        adding_(numbers, blocks, first_block, sketching_, tally_);
    }

    // Add a part of a block, filled up with zeros. The zeros change only counts and extremes, which are corrected here.
    void add_some(const std::byte *data, std::uint64_t start, std::size_t count) {
        if (count == 0) {
            return;
        }
        elements_.decode(data, count, decoded_);
        alignas(64) std::byte block[block_elements * sizeof(double)] = {};
        std::copy(decoded_, decoded_ + count * number_bytes(), block + start % block_elements * number_bytes());
        const double min = tally_.min;
        const double max = tally_.max;
        (wide() ? kernel_.f64 : kernel_.f32)(block, 1, start / block_elements, sketching_, tally_);
        const std::uint64_t padding = block_elements - count;
        tally_.zeros -= padding;
        tally_.padding += padding;
        tally_.min = min;
        tally_.max = max;
        for (std::size_t i = 0; i < count; ++i) {
            const std::byte *number = decoded_ + i * number_bytes();
            widen(wide() ? loaded<double>(number) : loaded<float>(number));
        }
    }

    template <typename Number> static double loaded(const void *from) {
        Number value;
        std::copy_n(static_cast<const std::byte *>(from), sizeof value, reinterpret_cast<std::byte *>(&value));
        return value;
    }

    void widen(double value) {
        tally_.min = value < tally_.min ? value : tally_.min;
        tally_.max = value > tally_.max ? value : tally_.max;
    }
};

std::uint64_t checked_count(const Run &run, const Elements &elements) {
    if (run.nbytes % elements.nbytes != 0) {
        throw std::invalid_argument("data has " + std::to_string(run.nbytes) + " bytes, no multiple of the " +
                                    std::to_string(elements.nbytes) + " that an element of " +
                                    std::string(elements.name) + " has");
    }
    const std::uint64_t count = run.nbytes / elements.nbytes;
    if (run.start > std::numeric_limits<std::uint64_t>::max() - count) {
        throw std::invalid_argument("start " + std::to_string(run.start) + " and " + std::to_string(count) +
                                    " elements reach beyond 2^64");
    }
    return count;
}

Sketching sketching_into(std::vector<double> &sketch, std::uint64_t key, std::uint64_t buckets) {
    if (buckets == 0) {
        return {nullptr, 0, 0};
    }
    if (!std::has_single_bit(buckets) || buckets < block_elements || buckets > most_buckets) {
        throw std::invalid_argument("buckets is " + std::to_string(buckets) +
                                    " but must be 0 or a power of two from 16 to " + std::to_string(most_buckets));
    }
    sketch.assign(buckets, 0.0);
    return {sketch.data(), buckets / block_elements - 1, key ^ sketch_seed};
}

void copy_tally(const Tally &tally, Statistics &statistics) {
    statistics.nan = tally.nan;
    statistics.inf = tally.inf;
    statistics.zeros = tally.zeros;
    statistics.min = tally.min + 0.0; // -0 becomes 0, whichever of the two came first
    statistics.max = tally.max + 0.0;
    statistics.sum = tally.sum;
    statistics.sum_of_squares = tally.sum_of_squares;
    statistics.exponents.front() -= tally.zeros + tally.padding;
    statistics.exponents.back() -= tally.nan + tally.inf;
}

} // namespace

std::vector<std::string> statistics_kernels() {
    std::vector<std::string> names;
    for (const Kernel *kernel : kernels) {
        if (kernel->works()) {
            names.emplace_back(kernel->name);
        }
    }
    return names;
}

Statistics statistics(const Run &run, std::uint64_t key, std::uint64_t buckets, std::string_view kernel) {
    const DefaultArithmetic arithmetic;
    const Elements &elements = elements_of(run.dtype);
    Statistics result;
    result.count = checked_count(run, elements);
    Gathering gathering(chosen_kernel(kernel), elements, sketching_into(result.sketch, key, buckets));
    Digests digests(1);
    const auto *data = static_cast<const std::byte *>(run.data);
    std::size_t hashed = 0;
    for (std::uint64_t done = 0; done < result.count;) {
        const std::uint64_t start = run.start + done;
        const std::uint64_t count = std::min(result.count - done, stretch_elements - start % stretch_elements);
        gathering.add(data + done * elements.nbytes, start, count);
        done += count;
        const std::size_t reached = done * elements.nbytes;
        if (reached - hashed >= hashed_bytes || done == result.count) {
            digests.feed(0, hashed, run.nbytes, data + hashed, reached - hashed);
            hashed = reached;
        }
        if ((run.start + done) % unpaired_elements == 0 || done == result.count) {
            gathering.unpair(result.exponents);
        }
    }
    result.checksum = digests.values().front();
    copy_tally(gathering.tally(), result);
    return result;
}

} // namespace dsh
