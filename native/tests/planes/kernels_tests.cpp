// Every kernel of byte planes does what the slow definition says, at any address, and reads and writes no further.

#include <algorithm>
#include <array>
#include <cstring>
#include <new>
#include <span>
#include <vector>

#include <sys/mman.h>

#include "harness.hpp"
#include "planes/kernels/kernel.hpp"

namespace dsh::test {
namespace {

using Bytes = std::vector<unsigned char>;

#ifdef __x86_64__
constexpr std::array kernels = {&portable_planes, &avx2_planes, &bmi2_planes, &avx512_planes};
#else
constexpr std::array kernels = {&portable_planes};
#endif

// Around the tile, the widths of all registers, and their tails.
std::size_t some_count(Random &random) {
    return random.coin() ? random.between(0, 200) : 1024 * random.between(0, 3) + random.between(0, 70);
}

// Bytes behind which there is no memory: who reads or writes beyond them, also with instructions that no sanitizer
// knows, ends the process.
class Exact {
  public:
    explicit Exact(std::size_t nbytes) : nbytes_(nbytes), whole_((nbytes + page - 1) / page * page) {
        void *const found = mmap(nullptr, whole_ + page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (found == MAP_FAILED) {
            throw std::bad_alloc();
        }
        memory_ = static_cast<unsigned char *>(found);
        CHECK(mprotect(memory_ + whole_, page, PROT_NONE) == 0);
    }
    Exact(const Exact &) = delete;
    Exact &operator=(const Exact &) = delete;
    ~Exact() { munmap(memory_, whole_ + page); }

    unsigned char *data() { return memory_ + whole_ - nbytes_; }
    std::span<unsigned char> bytes() { return {data(), nbytes_}; }
    bool is(const Bytes &expected) {
        return expected.size() == nbytes_ && std::equal(expected.begin(), expected.end(), data());
    }

  private:
    static constexpr std::size_t page = 1 << 16; // or a multiple of it

    std::size_t nbytes_;
    std::size_t whole_;
    unsigned char *memory_ = nullptr;
};

void fill(std::span<unsigned char> bytes, std::uint64_t most, Random &random) {
    for (unsigned char &byte : bytes) {
        byte = static_cast<unsigned char>(random.between(0, most));
    }
}

std::uint64_t element(const unsigned char *data, std::size_t i, std::size_t itemsize) {
    std::uint64_t word = 0;
    std::memcpy(&word, data + i * itemsize, itemsize);
    return word;
}

// What an element becomes, by docs/format.md, in wide arithmetic.
std::uint64_t transformed(std::uint64_t word, std::uint64_t base, std::size_t itemsize, Transform transform) {
    const std::uint64_t bits = 8 * itemsize;
    const std::uint64_t all = ~std::uint64_t{0} >> (64 - bits);
    const auto rotated = [&](std::uint64_t x) { return (x << 1 | x >> (bits - 1)) & all; };
    switch (transform) {
    case Transform::plain:
        return word;
    case Transform::rotated:
        return rotated(word);
    case Transform::exclusive:
        return word ^ base;
    case Transform::rotated_xor:
        return rotated(word ^ base);
    case Transform::difference:
        break;
    }
    const std::uint64_t difference = (word - base) & all;
    const bool is_negative = difference >> (bits - 1) != 0;
    return is_negative ? 2 * ((all - difference)) + 1 : 2 * difference;
}

Bytes planes_of(const unsigned char *data, const unsigned char *base, std::size_t count, std::size_t itemsize,
                Transform transform) {
    Bytes planes(count * itemsize);
    for (std::size_t i = 0; i < count; ++i) {
        const std::uint64_t word =
            transformed(element(data, i, itemsize), element(base, i, itemsize), itemsize, transform);
        for (std::size_t plane = 0; plane < itemsize; ++plane) {
            planes[plane * count + i] = static_cast<unsigned char>(word >> (8 * plane));
        }
    }
    return planes;
}

template <typename Run> void each_kernel(Run run) {
    for (const PlanesKernel *kernel : kernels) {
        if (kernel->works()) {
            run(*kernel);
        }
    }
}

Bytes quads_by_definition(const Bytes &plane, Bytes &others) {
    Bytes quads((plane.size() + 3) / 4);
    for (std::size_t i = 0; i < plane.size(); ++i) {
        const unsigned value = plane[i] < 3 ? plane[i] : 3;
        quads[i / 4] = static_cast<unsigned char>(quads[i / 4] | value << (2 * (i % 4)));
        if (value == 3) {
            others.push_back(plane[i]);
        }
    }
    return quads;
}

} // namespace

TEST(byte_planes_are_those_of_the_definition_and_joined_give_the_elements_again) {
    Random random(5);
    for (unsigned turn = 0; turn < 400; ++turn) {
        const std::size_t kind = turn % element_kinds;
        const std::size_t itemsize = std::size_t{1} << kind;
        const auto transform = static_cast<Transform>(turn / element_kinds % transforms);
        const std::size_t count = some_count(random);
        Exact data(count * itemsize);
        Exact base(count * itemsize);
        fill(data.bytes(), 255, random);
        fill(base.bytes(), 255, random);
        const Bytes expected = planes_of(data.data(), base.data(), count, itemsize, transform);
        const Bytes before(data.data(), data.data() + count * itemsize);
        each_kernel([&](const PlanesKernel &kernel) {
            Exact planes(count * itemsize);
            kernel.split[kind](data.data(), base.data(), count, transform, planes.data());
            CHECK(planes.is(expected));
            std::vector<Plane> given;
            for (std::size_t i = 0; i < itemsize; ++i) {
                given.push_back({planes.data() + i * count, false});
            }
            Exact again(count * itemsize);
            kernel.join[kind](given.data(), base.data(), count, transform, again.data());
            CHECK(again.is(before));
        });
    }
}

TEST(a_plane_of_one_byte_stands_for_all_of_its_bytes) {
    Random random(6);
    for (std::size_t kind = 0; kind < element_kinds; ++kind) {
        const std::size_t itemsize = std::size_t{1} << kind;
        const std::size_t count = 2500;
        Exact planes(count * itemsize);
        fill(planes.bytes(), 255, random);
        Exact values(itemsize);
        fill(values.bytes(), 255, random);
        std::vector<Plane> whole;
        std::vector<Plane> shortened;
        for (std::size_t i = 0; i < itemsize; ++i) {
            unsigned char *const plane = planes.data() + i * count;
            if (i % 2 == 0) {
                std::memset(plane, values.data()[i], count);
            }
            whole.push_back({plane, false});
            shortened.push_back({i % 2 == 0 ? values.data() + i : plane, i % 2 == 0});
        }
        each_kernel([&](const PlanesKernel &kernel) {
            Bytes expected(count * itemsize);
            Exact found(count * itemsize);
            kernel.join[kind](whole.data(), nullptr, count, Transform::rotated, expected.data());
            kernel.join[kind](shortened.data(), nullptr, count, Transform::rotated, found.data());
            CHECK(found.is(expected));
        });
    }
}

TEST(quads_are_those_of_the_definition_and_spread_give_the_plane_again) {
    Random random(7);
    for (unsigned turn = 0; turn < 600; ++turn) {
        const std::size_t count = some_count(random);
        Bytes plane(count);
        fill(plane, turn % 3 == 0 ? 3 : turn % 3 == 1 ? 255 : 2, random);
        Bytes others;
        const Bytes quads = quads_by_definition(plane, others);
        each_kernel([&](const PlanesKernel &kernel) {
            Exact from(count);
            std::copy(plane.begin(), plane.end(), from.data());
            Exact found_quads(quads.size());
            Exact found_others(count);
            CHECK(kernel.gather_quads(from.data(), count, found_quads.data(), found_others.data()) == others.size());
            CHECK(found_quads.is(quads));
            CHECK(std::equal(others.begin(), others.end(), found_others.data()));
            Exact known(others.size());
            std::copy(others.begin(), others.end(), known.data());
            Exact again(count);
            CHECK(kernel.spread_quads(found_quads.data(), known.data(), others.size(), count, again.data()) ==
                  others.size());
            CHECK(again.is(plane));
        });
    }
}

TEST(quads_that_ask_for_more_others_than_there_are_read_no_more) {
    Random random(8);
    for (unsigned turn = 0; turn < 300; ++turn) {
        const std::size_t count = some_count(random);
        Exact quads((count + 3) / 4);
        fill(quads.bytes(), 255, random);
        std::size_t asked = 0;
        for (std::size_t i = 0; i < count; ++i) {
            asked += (quads.data()[i / 4] >> (2 * (i % 4)) & 3) == 3;
        }
        Exact others(random.between(0, asked));
        each_kernel([&](const PlanesKernel &kernel) {
            Exact plane(count);
            const std::size_t known = others.bytes().size();
            CHECK(kernel.spread_quads(quads.data(), others.data(), known, count, plane.data()) == asked);
        });
    }
}

TEST(floats_are_taken_apart_at_any_address_and_denormals_are_refused) {
    Random random(9);
    for (unsigned turn = 0; turn < 400; ++turn) {
        const std::size_t count = some_count(random);
        const std::uint32_t of_zeros = 77;
        std::vector<std::uint32_t> words(count);
        for (std::uint32_t &word : words) {
            const auto bits = static_cast<std::uint32_t>(random.between(0, ~std::uint32_t{0}));
            const bool is_zero = random.between(0, 9) == 0;
            word = is_zero ? bits & 1U << 31 : (bits & 0x7f800000U) == 0 ? bits | 1U << 23 : bits;
        }
        const bool are_halves = turn % 2 == 0;
        for (std::uint32_t &word : words) {
            word &= are_halves ? ~0xffffU : ~0U;
        }
        const bool has_denormal = turn % 5 == 0 && count != 0;
        if (has_denormal) {
            words[random.between(0, count - 1)] = are_halves ? 0x80010000U : 0x007fffffU;
        }
        const bool has_other = are_halves && turn % 3 == 0 && count != 0;
        if (has_other) {
            words[random.between(0, count - 1)] = 0x3f800001U;
        }
        Exact numbers(4 * count);
        if (count != 0) {
            std::memcpy(numbers.data(), words.data(), 4 * count);
        }
        Bytes expected_signs, expected_exponents, expected_indices;
        std::vector<std::uint32_t> expected_mantissas;
        bool is_denormal = false;
        bool are_all_halves = true;
        for (const std::uint32_t word : words) {
            const std::uint32_t exponent = word >> 23 & 0xff;
            const std::uint32_t mantissa = word & 0x7fffff;
            const auto sign = static_cast<unsigned char>(word >> 31 << 7);
            is_denormal = is_denormal || (exponent == 0 && mantissa != 0);
            are_all_halves = are_all_halves && word % (1U << 16) == 0;
            expected_signs.push_back(sign);
            expected_exponents.push_back(static_cast<unsigned char>(exponent));
            expected_indices.push_back(static_cast<unsigned char>(sign | mantissa >> 16));
            expected_mantissas.push_back(exponent == 0 ? of_zeros : mantissa);
        }
        each_kernel([&](const PlanesKernel &kernel) {
            Exact exponents(count);
            Exact signs(count);
            std::vector<std::uint32_t> mantissas(count);
            CHECK(kernel.take_apart(numbers.data(), count, of_zeros, mantissas.data(), signs.data(),
                                    exponents.data()) == !is_denormal);
            CHECK(is_denormal || (signs.is(expected_signs) && exponents.is(expected_exponents)));
            CHECK(is_denormal || mantissas == expected_mantissas);
            Exact indices(count);
            const bool is_taken = kernel.take_halves_apart(numbers.data(), count, indices.data(), exponents.data());
            CHECK(is_taken == (are_all_halves && !is_denormal));
            CHECK(!is_taken || (indices.is(expected_indices) && exponents.is(expected_exponents)));
        });
    }
}

} // namespace dsh::test
