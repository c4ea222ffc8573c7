// The end of a file, where a signal comes in between.

#include <cerrno>
#include <filesystem>
#include <string>

#include "base/files/io_error.hpp"
#include "base/memory/aligned_memory.hpp"
#include "failing_calls.hpp"
#include "harness.hpp"
#include "writer/file/output_file.hpp"

namespace dsh::test {
namespace {

constexpr std::uint64_t page = 4096;

// Write a page, cut to it and seal, with a call that fails; returns the error's code.
int seal_with(FailingCall &call, int code, int times) {
    const std::string path = scratch() / "sealed";
    std::filesystem::remove(path);
    OutputFile file(path, 4 * page, page, nullptr);
    const AlignedMemory data = aligned_memory(page, page);
    std::fill_n(data.get(), page, std::byte{7});
    CHECK(file.write(data.get(), 0, page) == 0);
    call.fail(code, times);
    try {
        file.seal(page);
    } catch (const IoError &error) {
        call.fail(0, 0);
        return error.code;
    }
    CHECK(std::filesystem::file_size(path) == page);
    return 0;
}

} // namespace

TEST(an_interrupted_end_of_a_file_is_done_again) {
    CHECK(seal_with(failing_ftruncate, EINTR, 3) == 0);
    CHECK(seal_with(failing_fdatasync, EINTR, 3) == 0);
}

TEST(an_end_of_a_file_that_fails_is_an_error_and_leaves_no_file) {
    CHECK(seal_with(failing_ftruncate, EIO, 1) == EIO);
    CHECK(seal_with(failing_fdatasync, EIO, 1) == EIO);
    CHECK(!std::filesystem::exists(scratch() / "sealed"));
}

} // namespace dsh::test
